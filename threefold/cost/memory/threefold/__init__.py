"""Memory of a rank that runs our own engine, counted tensor by tensor and moment by moment from its code."""
