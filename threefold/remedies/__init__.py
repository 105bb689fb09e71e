"""What could help a plan: a catalogue of changes, and one function that tries them. All advice comes from here."""
