"""Nothing but what Hydra asks of a package: it finds these files as pkg://lathe.configs too, see src/lathe/configs."""
