"""Runs in the plural: listed, chosen, compared, tagged, archived, deleted. Imports no torch."""
