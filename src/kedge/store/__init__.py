"""The recording: a folder that is written while a program runs and read with numpy alone.

`recording` and `follow` are what other folders use; `reading`, `writing` and `export` are about its
files, and the other modules about the values in it.
"""
