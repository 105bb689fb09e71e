"""Deaths of jobs: the catalogue of how they read in a log, and which one a job died of."""
