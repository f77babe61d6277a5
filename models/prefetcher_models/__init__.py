"""Predictors: what learns from arrivals when each model will be used next."""
