"""Values from inside a model: of one call, of a whole data set, and summarized."""

import kedge.report  # noqa: F401 - first: it imports Rich without drawing random numbers
