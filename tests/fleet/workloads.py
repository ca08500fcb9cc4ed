"""Random workloads for fleets: shared prefixes, sessions, aborts, small pools; with a clock or by steps."""

import random


def random_workload(seed, timed, num_requests=40):
    rng = random.Random(f"fleet {seed} {timed}")
    config = {
        "max_num_batched_tokens": rng.choice([16, 64, 256]),
        "num_blocks": rng.choice([24, 40, 80]),
        "block_size": rng.choice([4, 16]),
        "max_num_seqs": rng.choice([2, 4, 8]),
        "async_scheduling": rng.random() < 0.3,
    }
    requests, time, step = [], 0.0, 0
    for index in range(num_requests):
        time += rng.expovariate(20)
        step += rng.randrange(3)
        parts = [{"len": rng.choice([8, 16, 32]), "seed": f"s{rng.randrange(3)}"}, {"len": rng.randint(1, 30)}]
        request = {"id": f"r{index}", "prompt": {"parts": parts}, "max_tokens": rng.randint(1, 12)}
        request["session"] = f"u{rng.randrange(6)}"
        request |= {"arrival_time": time} if timed else {"arrival_step": step}
        if rng.random() < 0.1:
            request["abort_step"] = step + rng.randrange(20)
        requests.append(request)
    workload = {"config": config, "requests": requests}
    return workload | ({"cost_model": {"fixed": 0.01, "per_row": 1e-3}} if timed else {})
