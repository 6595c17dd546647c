"""The servers that integration tests run against: processes of this machine, or containers.

``interface`` says what tests may ask for, ``local`` and ``containers`` give it, ``choice`` decides between them,
``faults`` breaks things. docs/testing.md describes all of it.
"""
