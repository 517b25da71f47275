"""Templates as a person reads them: names for references, statements one by one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Template = dict[str, Any]

# What CDK adds to a logical id to keep it apart from others.
_HASH = re.compile(r"[0-9A-F]{8}$")
_PSEUDO = {
    "AWS::AccountId": "111122223333",
    "AWS::Partition": "aws",
    "AWS::Region": "eu-west-1",
    "AWS::URLSuffix": "amazonaws.com",
}


def lint(template: str, region: str) -> list[Any]:
    """Return cfn-lint's matches for a template in a region."""
    from cfnlint import api  # imported late: every process of a run loads this module

    matches: list[Any] = api.lint(template, regions=[region])
    return matches


class Grant(NamedTuple):
    """One thing that a role may do to one resource, if a condition holds (as JSON)."""

    action: str
    resource: str
    condition: str = ""


class Deployment:
    """All stacks of one configuration; references between them are followed."""

    def __init__(self, templates: Mapping[str, Template]) -> None:
        self.templates = dict(templates)
        self._exports = {
            output["Export"]["Name"]: output["Value"]
            for template in self.templates.values()
            for output in template.get("Outputs", {}).values()
            if "Export" in output
        }

    def resources(self, kind: str, stack: str = "") -> dict[str, dict[str, Any]]:
        """Return the resources of a type (`AWS::SQS::Queue`) in all stacks by their plain names."""
        return {
            _plain_id(name): resource
            for own, template in self.templates.items()
            if stack in {"", own}
            for name, resource in template["Resources"].items()
            if resource["Type"] == kind
        }

    def properties(self, kind: str, stack: str = "") -> dict[str, dict[str, Any]]:
        """Return the properties of the resources of a type, with names for references."""
        return {
            name: self.plain(resource.get("Properties", {}))
            for name, resource in self.resources(kind, stack).items()
        }

    def outputs(self, stack: str) -> dict[str, Any]:
        """Return the outputs of a stack, less what other stacks import."""
        return {
            name: self.plain(output["Value"])
            for name, output in self.templates[stack]["Outputs"].items()
            if "Export" not in output
        }

    def plain(self, value: Any) -> Any:
        """Return a value with the name of a resource in place of each reference to it.

        An attribute of a resource reads `Name.Attribute`.
        """
        match value:
            case {"Ref": name}:
                return _PSEUDO.get(name) or _plain_id(name)
            case {"Fn::GetAtt": [name, attribute]}:
                return f"{_plain_id(name)}.{attribute}"
            case {"Fn::ImportValue": name}:
                return self.plain(self._exports[name])
            case {"Fn::Join": [separator, parts]}:
                return separator.join(self.plain(part) for part in parts)
            case {"Fn::FindInMap": [name, key, second]}:
                mappings = (template.get("Mappings", {}) for template in self.templates.values())
                [mapping] = (found[name] for found in mappings if name in found)
                return mapping[self.plain(key)][self.plain(second)]
            case {"Fn::Sub": str(text)}:
                return re.sub(r"\$\{([^}]+)\}", lambda found: _PSEUDO[found[1]], text)
            case dict():
                return {key: self.plain(inner) for key, inner in value.items()}
            case list():
                return [self.plain(inner) for inner in value]
        return value

    def grants(self, role: str, stack: str = "") -> set[Grant]:
        """Return all that the policies of a role allow, or those of one stack."""
        return _grants(self._statements_of(role, stack))

    def granted(self, policy: Mapping[str, Any]) -> set[Grant]:
        """Return all that one policy allows."""
        return _grants(policy["PolicyDocument"]["Statement"])

    def statements(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every statement of a role's or a user's policies, with the policy's name."""
        for kind in ("AWS::IAM::Policy", "AWS::IAM::ManagedPolicy"):
            for name, policy in self.properties(kind).items():
                for statement in policy["PolicyDocument"]["Statement"]:
                    yield name, statement
        for kind in ("AWS::IAM::Role", "AWS::IAM::User", "AWS::IAM::Group"):
            for name, holder in self.properties(kind).items():
                for policy in holder.get("Policies", ()):
                    for statement in policy["PolicyDocument"]["Statement"]:
                        yield name, statement

    def resource_statements(self, kind: str, of: str) -> list[dict[str, Any]]:
        """Return the statements of the only policy of a kind for a resource, such as a queue."""
        (policy,) = (
            policy
            for policy in self.properties(kind).values()
            for held in ("Bucket", "Queues", "Topics")
            if of in each(policy.get(held))
        )
        found: list[dict[str, Any]] = policy["PolicyDocument"]["Statement"]
        return found

    def _statements_of(self, role: str, stack: str) -> Iterator[dict[str, Any]]:
        for kind in ("AWS::IAM::Policy", "AWS::IAM::ManagedPolicy"):
            for policy in self.properties(kind, stack).values():
                if role in policy["Roles"]:
                    yield from policy["PolicyDocument"]["Statement"]
        for policy in self.properties("AWS::IAM::Role")[role].get("Policies", ()):
            yield from policy["PolicyDocument"]["Statement"]


def _grants(statements: Iterable[Mapping[str, Any]]) -> set[Grant]:
    return {
        Grant(action, resource, _condition(statement))
        for statement in statements
        for action in each(statement["Action"])
        for resource in each(statement["Resource"])
    }


def each(value: Any) -> Iterable[Any]:
    """Return the values of what may be a list of them or one alone."""
    return value if isinstance(value, list) else [value]


def _condition(statement: Mapping[str, Any]) -> str:
    found = statement.get("Condition")
    return json.dumps(found, sort_keys=True) if found else ""


def _plain_id(logical_id: str) -> str:
    return _HASH.sub("", logical_id)
