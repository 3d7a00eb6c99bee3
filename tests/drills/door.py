"""A door before a server: passes everything on, or misbehaves. `python tests/drills/door.py PORT UPSTREAM_PORT`. Standard library only.

So a server that many cells share can be struck in one of them: whoever speaks through the door cannot tell whose fault it is.
order.json of the cell (see points) says what to do from now on: hang, garbage, HTTP 403, HTTP 500, HTTP 503, full, reset, slow. 403 and full are
said as S3 servers say them.
"""

import asyncio
import os
import socket
import struct
import sys
from asyncio import StreamReader, StreamWriter

import points

HOST = "127.0.0.1"


def http(status: str, content: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    return head.encode() + content


ANSWERS = {
    "garbage": http("200 OK", b'{"id": 7, "nonsense": tru'),
    "HTTP 500": http("500 Internal Server Error", b'{"detail": "database is locked"}'),
    "HTTP 503": http("503 Service Unavailable", b'{"detail": "busy"}'),
    "HTTP 403": http("403 Forbidden", b"<Error><Code>AccessDenied</Code><Message>these keys are not taken</Message></Error>"),
    "full": http("507 Insufficient Storage", b"<Error><Code>XMinioStorageFull</Code><Message>no space left</Message></Error>"),
}


async def misbehave(fault: str, client: StreamWriter) -> None:
    match fault:
        case "hang":
            await asyncio.sleep(3600)
        case "reset":
            bare: socket.socket = client.get_extra_info("socket")
            bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        case _:
            client.write(ANSWERS[fault])
            await client.drain()


POINT_AT_POST = 4
num_posts = 0
SLOW_S = 0.15
"""Before each piece of data, both ways."""
OF_STORE = ((b"/objects/", "store.sending"), (b"/under-way/", "store.copying"))
"""Objects of committed parts, and of samples under way."""


def count(data: bytes) -> None:
    """The middle of a delivery to MLflow, which posts a dozen times."""
    global num_posts
    num_posts += data.startswith(b"POST /api/2.0/mlflow/")  # whoever else may try this port does not count
    if num_posts == POINT_AT_POST:
        points.reach("commit_step.delivering")  # everybody waits at a door that stands still


async def half_sent(data: bytes, writer: StreamWriter) -> bytes:
    """Come to the point of an upload to the store when half of it is there. Gives the rest."""
    line = data.partition(b"\r\n")[0]
    for part, point in OF_STORE:
        if line.startswith(b"PUT ") and part in line and points.plan().get("point") == point:
            half = len(data) // 2
            writer.write(data[:half])
            await writer.drain()
            points.reach(point)
            return data[half:]
    return data


async def pump(reader: StreamReader, writer: StreamWriter, client: StreamWriter) -> None:
    while data := await reader.read(2**16):
        count(data)
        data = await half_sent(data, writer)
        if (fault := points.ordered("door")) == "slow":
            await asyncio.sleep(SLOW_S)
        elif fault:
            await misbehave(fault, client)
            return
        writer.write(data)
        await writer.drain()


async def serve(upstream: tuple[str, int], reader: StreamReader, client: StreamWriter) -> None:
    writers = [client]
    try:
        from_server, to_server = await asyncio.open_connection(*upstream)
        writers.append(to_server)
        both = [asyncio.create_task(pump(reader, to_server, client)), asyncio.create_task(pump(from_server, client, client))]
        _, other = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in other:
            task.cancel()
    except ConnectionError:
        pass
    finally:
        for writer in writers:
            writer.transport.abort() if points.ordered("door") == "reset" else writer.close()


async def main(port: int, upstream_port: int, upstream_host: str = HOST) -> None:
    server = await asyncio.start_server(lambda r, w: serve((upstream_host, upstream_port), r, w), HOST, port)
    print("listening", os.getpid(), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
