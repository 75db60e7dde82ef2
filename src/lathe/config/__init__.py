"""What a composed configuration must satisfy before any data or device is touched. Imports no torch: it answers at
once.
"""
