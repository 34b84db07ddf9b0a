"""Publish artifacts on the hub: files, model card, licence, and the check of every hash after the upload."""

from quantmill.fetch import hub as hub  # imported before the hub's client, because it sets what that logs
