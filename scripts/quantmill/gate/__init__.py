"""The quality gate: expected predictions of a model, and the check of every artifact against them."""
