"""What is known before any job runs: the config, checked, and what its jobs take.

Imported by Snakemake itself, so it needs nothing that Snakemake does not bring; but for `origins`, which asks the hub.
"""
