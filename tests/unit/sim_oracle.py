"""One call on simulated wires, again: with SimPy's processes and resources, not the engine."""

import simpy


def run(programs, network, machine, ready):
    """When each rank ends."""
    env = simpy.Environment()
    size = len(programs)
    outgoing = {h: simpy.Resource(env, 1) for h in set(network.hosts)}
    incoming = {h: simpy.Resource(env, 1) for h in set(network.hosts)}
    inbox = {(a, b): simpy.Store(env) for a in range(size) for b in range(size)}
    ends = [0.0] * size

    def carry(rank, message, gone):
        here, there = network.hosts[rank], network.hosts[message.peer]
        with outgoing[here].request() as out:
            yield out
            with incoming[there].request() as into:
                yield into
                slower = min(network.interface(here), network.interface(there))
                yield env.timeout(message.nbytes / slower)
        gone.append(env.now)
        env.process(arrive(rank, message))

    def arrive(rank, message):
        yield env.timeout(network.latency_s)
        yield inbox[rank, message.peer].put(message)

    def process(rank):
        program, gone, posted = programs[rank], [], []

        def spend(segment, kernel):
            free = kernel == "decode" and program.exact
            cost = 0 if free else getattr(machine.cost(segment.codec), kernel) * segment.count
            return env.timeout(cost)

        def post(message):
            posted.append(env.process(carry(rank, message, gone)))

        yield env.timeout(ready[rank])
        queue = [(None, list(program.first_sends))]
        queue += [(message, message.then) for message in program.recvs]
        for received, sends in queue:
            if received is not None:
                yield inbox[received.peer, rank].get()
                yield env.timeout(machine.message_s)
                if not received.final:
                    (segment,) = received.segments
                    if received.fused is not None:
                        yield spend(segment, "hop")
                        yield env.timeout(machine.message_s)
                        post(received.fused)
                    elif received.finalize is not None:
                        yield spend(segment, "hop")
                        yield spend(segment, "decode")
                    else:
                        yield spend(segment, "decode_add")
            for message in sends:
                for segment in message.encode:
                    yield spend(segment, "encode")
                    if message.final:
                        yield spend(segment, "decode")
                if message.final or message.encode:
                    yield env.timeout(machine.message_s)
                    post(message)
            if received is not None and received.final:
                for segment in received.segments:
                    yield spend(segment, "decode")
        done = env.now
        yield simpy.AllOf(env, posted)
        ends[rank] = max([done, *gone])

    for rank in range(size):
        env.process(process(rank))
    env.run()
    return ends
