"""Monitors and reports of runs, from the files of the runs alone. Never imports torch."""

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
