"""What loads.measure does: the loads of a study, one start of a server under all of them, and what they came to."""
