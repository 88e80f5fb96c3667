"""Does nothing: a process runs this in place of a request that was taken back; see `kedge.running.remote_exec`."""
