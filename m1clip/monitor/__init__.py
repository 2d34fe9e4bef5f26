"""Watching runs and telling of them. Reads their files and nothing else; never torch."""

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Names by which a machine speaks to itself."""
