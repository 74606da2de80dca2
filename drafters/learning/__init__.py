"""What the gateway and the learner share on disk, so that a head learns from its own traffic.

    DIR/                     only its owner may read it
      captured/NAME.jsonl    token ids of prompts and answers (`captured`)
      load                   how many requests run now (`load_signal`)
      generations/0001/      a head that was trained further, and what is known of it (`lineage`)
      in_force, pinned       numbers of generations; 0 is the head that the gateway was started with

Neither torch nor vllm: the gateway imports it.
"""

WORK = "work"  # the folder of what a round of the learner has made so far
