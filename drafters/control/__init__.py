"""The choice of K: how many draft tokens each request gets in a step.

More draft tokens make more tokens a step, and longer steps. The controller chooses the K with the
most tokens per second:

    tokens_per_second(K) = requests * (1 + s1 + s2 + ... + sK) / seconds(requests, K)

`si` is the share of drafts that are accepted up to position i (`acceptance`). Each request makes
one token without drafts: the target's own. `seconds` is what a steady step takes, one that verifies
as many draft tokens as it drafts (`cost_table`). K = 0 is one of the choices: such a step is called
plain, and the drafter does not run. At K > 0 the drafter also reads every prompt: its seconds of
reading per output token, times the tokens of the step, are added to `seconds` (`predictions`).

An example. Four requests run. Of their drafts 58% are accepted at the first position, 27% also at
the second, 14% also at the third. A step takes 23.2 ms without drafts, and 28.4, 28.2 and 29.7 ms
at K = 1, 2 and 3. As costs never fall with K, K = 1 and 2 both count with 28.3 ms.

>>> from drafters.control.controller import Controller
>>> from drafters.control.cost_table import Cell
>>> from drafters.control.policy import Load
>>> controller = Controller(k_max=3)
>>> seconds = [0.0232, 0.0284, 0.0282, 0.0297]
>>> controller.load_calibration(Cell(4, k, seconds[k], steps=100) for k in range(4))
>>> for step in range(100):
...     controller.acceptance.observe(1000, drafted=(1000, 1000, 1000), accepted=(580, 273, 139))
>>> controller.choose(Load(requests=4))
3
>>> for row in controller.snapshot()["costs"]:
...     print(row["k"], f"{row['step_tokens']:.2f} tokens {row['tokens_per_second']:.0f} a second")
0 4.00 tokens 172 a second
1 6.32 tokens 223 a second
2 7.42 tokens 262 a second
3 7.98 tokens 269 a second

docs/choice-of-k.md shows more loads, and what keeps the choice from being a guess.

The modules. Each imports only those above it; `policy` also names the type of a `DraftPlan`.

    tuning       every constant
    policy       what the scheduler reports (`Load`, `Step`), and the interface `Policy`
    objective    throughput, latency, a fixed K, or off
    acceptance   the share of draft tokens accepted at each position
    cost_table   seconds of a steady step by batch and K
    read_costs   seconds to read a prompt token
    traffic      recent prompt and output tokens, and the tokens that the drafter has not read
    predictions  seconds, tokens and tokens per second of each K at a load (`Predictor`)
    sources      the gain of head, lookups and spans (`planner`), and the source of each request's
                 drafts (`draft_plan`)
    learning     a step's seconds, split into reading and a steady step (`StepLearner`)
    probes       a few steps with another K, and what they may lose
    report       the state as plain data: rows, and sums over all steps
    controller   the choice of K; passes each finished step to the modules that learn from it
"""
