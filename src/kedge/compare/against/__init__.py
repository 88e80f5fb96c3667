"""What held in a good run, asked of another one, by structure and not by bits.

Each file but `departures` and `run_pair` has relations of one subject: functions of a pair of runs
that yield what held in the good one and does not hold in the other.
"""
