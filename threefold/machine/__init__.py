"""THIS MACHINE: what is installed and runs here, and whether a plan can do with it. No torch: `engine.here` asks it."""
