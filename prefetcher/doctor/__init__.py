"""`prefetcher doctor`: what this machine, and the servers that the settings name, give the program, and what to change. Changes nothing.

One module for each concern (`memory`, `files`, `runtime`, `servers`); `checks` is the table of all of them. It covers no settings that
can't be read (`config`), and makes no topics, unlike `config_check`.
"""
