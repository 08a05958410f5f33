"""The panels of the labs (ipywidgets). (Their place.)"""
