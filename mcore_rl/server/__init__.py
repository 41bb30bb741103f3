"""An engine behind HTTP, in OpenAI's words: so that agents and evaluators can talk to the policy, also while it is trained.

    worker.py    one thread that owns the engine and batches what all clients ask
    asked.py     a request's JSON into what the engine takes; everything that is not understood is refused by name
    text.py      token ids into text as they come
    answers.py   what the engine made into OpenAI's JSON
    app.py       routes, the key, streams, clients that go away
    server.py    a socket, a port and an end

Only `app.py` and `server.py` need starlette and uvicorn.
"""
