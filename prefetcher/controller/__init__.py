"""The controller: arrivals in, plans out."""
