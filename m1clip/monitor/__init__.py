"""Monitors and reports of runs, from the files of the runs alone. Never imports torch."""
