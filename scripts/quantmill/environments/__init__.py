"""Virtual environments from pins, and bundles of them for machines without a network."""
