"""Servers that their users run, found by a run's `url`, and asked from the report's environment."""

from quantmill.engines.served.attached_servers import SERVERS

for name, server in SERVERS.items():
    ENGINES[name] = Engine(
        env="tools",
        loads=LAYOUTS.keys() if server.loads is None else server.loads,  # a view: with those that formats' files add
        implementation=server.implementation,
        options={
            "model": {"type": "string", "minLength": 1},
            "token_variable": {"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]*$"},
            "authority": {"type": "string", "minLength": 1},
        },
        multi_gpu=True,
        serves=True,
        attached=True,
        resources=RunResources(cpu=200, cuda=200, start=5, block=0.0001, held=0),
    )
