"""The operations of the step in which two runs first differ, seen in second runs, and the one that parts them.

`seen` has what is known of an operation, `second_run` runs a recorded program again, `pairs` and
`departure` find the operation, and `finding` says it.
"""
