"""Times and errors of calls that were not made, on clusters that were measured or described."""
