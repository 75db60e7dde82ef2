"""The formats of runtimes, one module each; `lathe.export.TARGETS` finds them."""
