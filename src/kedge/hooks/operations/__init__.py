"""The places inside a module's own forward: its operations, one by one."""
