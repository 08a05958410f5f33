"""Events and flags to findings: which part of the memory ran out, why, and what to set. (Its place.)"""
