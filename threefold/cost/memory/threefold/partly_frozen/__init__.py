"""Memory of plans in which some weights do not train."""
