"""A whole overlay that trusts only its own authority: brokers, clients, operators."""

import dataclasses

import pytest
import yaml

from clients import EdgeNotFoundError, RefusedError, TopicQos
from overlay.errors import CloseReason
from overlay.messages import Declare, EndpointKind, Role
from runtime.tokens import Tokens
from tests.integration.harness import eventually, overlay

pytestmark = pytest.mark.integration


class Rule(dict):
    """One rule of access."""

    def __init__(self, principals, **allowed):
        super().__init__(principals=principals, **allowed)


def write_rules(folder, *rules):
    """Write a file of rules, at once; returns its name."""
    draft, path = folder / "draft.yaml", folder / "access.yaml"
    draft.write_text(yaml.safe_dump({"rule": [dict(rule) for rule in rules]}))
    draft.replace(path)
    return str(path)


async def test_an_encrypted_overlay_carries_messages_through_a_crash(
    zookeeper_hosts, chroot, certificates, tmp_path
):
    """Client to edge, edge to edge, edge to router, router to router: all encrypted, nothing lost."""
    async with overlay(zookeeper_hosts, chroot, certificates=str(certificates)) as testbed:
        access = write_rules(tmp_path, Rule(["*"], publish=["**"], subscribe=["**"], declare=["**"]))
        for name in ("r1", "r2"):
            await testbed.router(name)
        for name, lan in (("ea", "a"), ("ea2", "a"), ("eb", "b")):
            await testbed.edge(name, lan, access=access)
        options = {"certificates": certificates, "principal": "alice"}
        receiver, neighbour = await testbed.client("eb", **options), await testbed.client("ea2", **options)
        sender = await testbed.client("ea", **options)
        qos = TopicQos(retention=1024)
        subscriptions = [await client.subscribe("t", qos) for client in (receiver, neighbour)]
        publisher = await sender.publisher("t", qos)
        await testbed.wait_for_route("t", "ea", "eb")
        await eventually(lambda: testbed.edges["ea"]._links["edge:ea2"].is_up, "the LAN's edges are linked")
        await eventually(
            lambda: any(
                link.is_up and link.role is Role.ROUTER
                for router in testbed.routers.values()
                for link in router._links.values()
            ),
            "the routing brokers are linked",
        )
        for number in range(100):
            await publisher.publish(b"%d" % number)
        await sender.flush(10)
        primary = testbed.topic_at("ea", "t").primary
        for connection in list(testbed.routers[primary].hub._connections):
            connection.abort(CloseReason.LOST, "crashed")
        await testbed.routers.pop(primary).close()
        for number in range(100, 200):
            await publisher.publish(b"%d" % number)
        for subscription in subscriptions:
            got = [(await subscription.receive(10)).payload for _ in range(200)]
            assert got == [b"%d" % number for number in range(200)]
        connections = [
            connection
            for broker in (*testbed.edges.values(), *testbed.routers.values())
            for connection in broker.hub._connections
            if connection.is_open
        ]
        assert len(connections) >= 8
        assert all(connection.peer_certificate is not None for connection in connections)


async def test_a_client_does_what_its_rules_allow_and_nothing_else(
    zookeeper_hosts, chroot, certificates, tmp_path
):
    access = write_rules(
        tmp_path,
        Rule(["alice"], publish=["plant/**"], declare=["plant/**"]),
        Rule(["bob"], subscribe=["plant/**"], publish=["plant/new"]),
    )
    async with overlay(zookeeper_hosts, chroot, certificates=str(certificates)) as testbed:
        edge = await testbed.edge("ea", "a", access=access)
        alice = await testbed.client("ea", certificates=certificates, principal="alice")
        bob = await testbed.client("ea", certificates=certificates, principal="bob")
        publisher = await alice.publisher("plant/1")
        subscription = await bob.subscribe("plant/1")
        await publisher.publish(b"hello")
        assert (await subscription.receive(10)).payload == b"hello"
        denied = [
            (alice.subscribe("plant/1"), "alice may not subscribe plant/1"),
            (alice.publisher("other"), "alice may not publish other"),
            (bob.publisher("plant/1"), "bob may not publish plant/1"),
            (bob.publisher("plant/new"), "bob may not declare plant/new"),
            (bob.subscribe("plant/unknown"), "bob may not declare plant/unknown"),
        ]
        for attempt, words in denied:
            with pytest.raises(RefusedError, match=words) as refused:
                await attempt
            assert refused.value.code == "access"
        assert set(await edge.coordinator.topics()) == {"plant/1"}
        with pytest.raises(EdgeNotFoundError, match="clients must prove who they are"):
            await testbed.client("ea", certificates=certificates, start_timeout_s=1)
        with pytest.raises(EdgeNotFoundError, match="only TLS is spoken here"):
            await testbed.client("ea", start_timeout_s=1)
        assert edge.access.statistics().denied["connect"] >= 1
        # A client that is allowed to publish still cannot go on in another one's name.
        write_rules(tmp_path, Rule(["*"], publish=["plant/**"], subscribe=["plant/**"]))
        await eventually(lambda: edge.access.statistics().reloads == 1, "the rules have been read again")
        rival = await bob.publisher("plant/1")
        denied_before = edge.access.statistics().denied["publish"]
        bob._link.send(dataclasses.replace(rival.declaration(), endpoint=publisher.endpoint_id))
        await eventually(
            lambda: edge.access.statistics().denied["publish"] > denied_before, "the theft is refused"
        )
        await publisher.publish(b"still mine")
        assert (await subscription.receive(10)).payload == b"still mine"
        topic = testbed.topic_at("ea", "plant/1")
        assert topic.publishers[publisher.endpoint_id].principal == "alice"


async def test_a_name_that_no_topic_can_have_is_refused_before_it_is_kept(
    zookeeper_hosts, chroot, certificates, tmp_path, monkeypatch
):
    """Rules remember what they have decided, so that a stranger could fill the memory with long names."""
    access = write_rules(tmp_path, Rule(["alice"], publish=["*-a*-b*"]))
    async with overlay(zookeeper_hosts, chroot, certificates=str(certificates)) as testbed:
        edge = await testbed.edge("ea", "a", access=access)
        bob = await testbed.client("ea", certificates=certificates, principal="bob")
        with pytest.raises(RefusedError, match="bob may not subscribe x"):
            await bob.subscribe("x")
        remembered = dict(edge.access._rules._decided)
        answers = []
        monkeypatch.setattr(bob, "on_control", lambda link, message: answers.append(message))
        for number in range(5):
            bob._link.send(Declare(number, EndpointKind.PUBLISHER, f"{number}" + "-a" * 100_000))
        await eventually(lambda: len(answers) == 5, "all are refused")
        assert {answer.code for answer in answers} == {"invalid_name"}
        assert all(len(answer.reason) < 200 for answer in answers)
        assert edge.access._rules._decided == remembered


async def test_a_revoked_token_ends_connections_and_what_would_be_sent_again(
    zookeeper_hosts, chroot, certificates, tmp_path
):
    """Nothing of a revoked publisher goes anywhere: not what it sends anew, not what was kept of it."""
    tokens, token = Tokens().add("alice")
    tokens.save(tmp_path / "tokens.json")
    access = write_rules(tmp_path, Rule(["*"], publish=["**"], subscribe=["**"], declare=["**"]))
    settings = {"access": access, "tokens": str(tmp_path / "tokens.json")}
    async with overlay(zookeeper_hosts, chroot, certificates=str(certificates)) as testbed:
        edge = await testbed.edge("ea", "a", **settings)
        await testbed.edge("eb", "b", access=access)
        alice = await testbed.client("ea", certificates=certificates, token=token)
        bob = await testbed.client("eb", certificates=certificates, principal="bob")
        qos = TopicQos(retention=64)
        subscription = await bob.subscribe("t", qos)
        publisher = await alice.publisher("t", qos)
        await eventually(lambda: publisher.subscribers == 1, "the subscriber is known")
        for number in range(10):  # kept by the edge: there is no routing broker yet
            await publisher.publish(b"%d" % number)
        await alice.flush(10)
        topic = testbed.topic_at("ea", "t")
        assert topic.publishers[publisher.endpoint_id].retention.unsent == 10
        Tokens.load(tmp_path / "tokens.json").revoke(token.partition(".")[0]).save(tmp_path / "tokens.json")
        await eventually(lambda: not alice.is_connected, "the client is cut off")
        # It goes on trying to come back, with messages it has not been able to send.
        await publisher.publish(b"too late")
        await eventually(lambda: edge.access.statistics().denied.get("connect", 0) >= 2, "it is refused")
        assert not alice.is_connected
        await testbed.router("r1")
        await eventually(lambda: topic.primary == "r1", "the topic has a routing broker")
        carol = await testbed.client("ea", certificates=certificates, principal="alice")
        trusted = await carol.publisher("t", qos)
        await testbed.wait_for_route("t", "ea", "eb")
        await trusted.publish(b"trusted")
        assert (await subscription.receive(10)).payload == b"trusted"
        assert subscription.statistics().delivered == 1


async def test_rules_that_change_count_for_endpoints_that_are_there(
    zookeeper_hosts, chroot, certificates, tmp_path
):
    access = write_rules(tmp_path, Rule(["*"], publish=["**"], subscribe=["**"], declare=["**"]))
    async with overlay(zookeeper_hosts, chroot, certificates=str(certificates)) as testbed:
        await testbed.edge("ea", "a", access=access)
        alice = await testbed.client("ea", certificates=certificates, principal="alice")
        bob = await testbed.client("ea", certificates=certificates, principal="bob")
        publishers = {name: await alice.publisher(name) for name in ("kept", "taken")}
        subscriptions = {name: await bob.subscribe(name) for name in ("kept", "taken")}
        write_rules(tmp_path, Rule(["*"], publish=["kept"], subscribe=["kept"]))
        with pytest.raises(RefusedError, match="bob may not subscribe taken"):
            await subscriptions["taken"].receive(10)
        await eventually(lambda: publishers["taken"]._ended is not None, "the publisher is told")
        with pytest.raises(RefusedError, match="alice may not publish taken"):
            await publishers["taken"].publish(b"x")
        await publishers["kept"].publish(b"x")
        assert (await subscriptions["kept"].receive(10)).payload == b"x"
        assert (alice.reconnects, bob.reconnects) == (0, 0)
