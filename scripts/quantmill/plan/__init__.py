"""The config and its checks, cells, registered formats and engines, and what jobs take: all that precedes a job.

Snakemake imports most of it, so it needs only what Snakemake brings; `model_facts` needs the hub's client and `probe`
numpy.
"""
