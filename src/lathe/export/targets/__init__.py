"""The runtimes' formats, a file each; `lathe.export.TARGETS` names them."""
