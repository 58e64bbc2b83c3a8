"""Contracts, configuration, tasks, driver, metrics and the command line."""
