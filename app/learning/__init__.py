"""What the gateway does so that its head learns from traffic: captures sequences, says how many it
answers, and runs the learner.

Nothing here may cost a request: the event loop hands sequences over and never waits, and whatever
fails is logged and counted.
"""
