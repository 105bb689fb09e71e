"""What happens inside one step of a device: its window, its budget of time, and what each gap waited for."""
