"""At rest: the recording, a folder that is written while a program runs and read with numpy alone."""
