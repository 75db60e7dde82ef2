"""Compression methods as callbacks, which schedule the algorithms of `lathe.compression`."""
