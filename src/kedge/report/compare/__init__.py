"""Two recordings compared, drawn: in a terminal, as a page, as one object for programs."""
