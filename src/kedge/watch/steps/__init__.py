"""When and how much: what makes the steps, what each may cost, and how the program is kept safe from it."""
