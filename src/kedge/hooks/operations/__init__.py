"""The operations inside a module's own forward, one by one."""
