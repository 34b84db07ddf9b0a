"""Servers under the loads of a study: several starts of one server, and their joint figures."""
