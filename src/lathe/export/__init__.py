"""Ways to ship a net, one file per target: export, load, run."""
