"""The door: one file a verb; parse, call one function, print, return a code."""
