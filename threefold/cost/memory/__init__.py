"""Bytes that each pipeline stage holds at its peak, by named term: one model per stack behind one interface."""
