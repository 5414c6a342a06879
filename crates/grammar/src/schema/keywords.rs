//! All keywords of JSON Schema (drafts 4 to 2020-12) and OpenAPI (3.0, 3.1). `docs/schemas.md` has this table.

/// Effect of a keyword on an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Effect {
    /// A finished answer fits it.
    Enforced,
    /// Enforced in the forms that the note names, and refused otherwise.
    InPart,
    /// Names a schema, for references.
    Name,
    /// Binds nothing.
    Annotation,
}

/// Schemas in the value of a keyword.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holds {
    /// The value is no schema.
    Value,
    /// The value is a schema, or a list of schemas.
    Schema,
    /// The value is an object of schemas.
    Schemas,
}

/// A keyword.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keyword {
    pub name: &'static str,
    /// Drafts that define it.
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "a column of the documentation, which a test compares")
    )]
    pub drafts: &'static str,
    pub effect: Effect,
    pub holds: Holds,
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "a column of the documentation, which a test compares")
    )]
    pub note: &'static str,
}

/// Returns a keyword; `None` for a key that no standard defines, which is an annotation.
pub(crate) fn find(name: &str) -> Option<&'static Keyword> {
    KEYWORDS.iter().find(|keyword| keyword.name == name)
}

const fn keyword(
    name: &'static str,
    drafts: &'static str,
    effect: Effect,
    holds: Holds,
    note: &'static str,
) -> Keyword {
    Keyword { name, drafts, effect, holds, note }
}

use Effect::{Annotation, Enforced, InPart, Name};
use Holds::{Schema, Schemas, Value};

const ALL: &str = "all";

/// The keywords.
pub(crate) const KEYWORDS: &[Keyword] = &[
    keyword("type", ALL, Enforced, Value, ""),
    keyword("enum", ALL, Enforced, Value, ""),
    keyword("const", "6+", Enforced, Value, ""),
    keyword("nullable", "OpenAPI 3.0", Enforced, Value, "beside `type`, `null` is allowed as well"),
    keyword("multipleOf", ALL, Enforced, Value, ""),
    keyword("minimum", ALL, Enforced, Value, ""),
    keyword("maximum", ALL, Enforced, Value, ""),
    keyword("exclusiveMinimum", ALL, Enforced, Value, "as a number, or as draft 4's boolean"),
    keyword("exclusiveMaximum", ALL, Enforced, Value, "as a number, or as draft 4's boolean"),
    keyword("minLength", ALL, Enforced, Value, ""),
    keyword("maxLength", ALL, Enforced, Value, ""),
    keyword(
        "pattern",
        ALL,
        InPart,
        Value,
        "without look-around (except a `^(?=...)` at the beginning, and the patterns that zod writes), word boundaries, back-references",
    ),
    keyword("format", ALL, Enforced, Value, "the formats listed below; any other is an annotation"),
    keyword("items", ALL, Enforced, Schema, "a schema, or a list as before 2020-12"),
    keyword("prefixItems", "2020-12", Enforced, Schema, ""),
    keyword("additionalItems", "4 to 2019-09", Enforced, Schema, "binds nothing unless `items` is a list"),
    keyword("minItems", ALL, Enforced, Value, ""),
    keyword("maxItems", ALL, Enforced, Value, ""),
    keyword(
        "uniqueItems",
        ALL,
        InPart,
        Value,
        "`true` with `items` of at most 8 values (`enum`, `const`, boolean; more than 5 come in the order of the list), with at most one item, or with items of which no two can be equal",
    ),
    keyword(
        "contains",
        "6+",
        Enforced,
        Schema,
        "the item is one of the first four; several (`minContains`, `maxContains`) come first",
    ),
    keyword("minContains", "2019-09+", InPart, Value, "at most 16; binds nothing without `contains`"),
    keyword(
        "maxContains",
        "2019-09+",
        InPart,
        Value,
        "if the other items can be described, see `not`; binds nothing without `contains`",
    ),
    keyword("unevaluatedItems", "2019-09+", InPart, Schema, "without `contains` and alternatives beside it"),
    keyword("properties", ALL, Enforced, Schemas, "they come in this order"),
    keyword("patternProperties", ALL, InPart, Schemas, "if no name fits two patterns"),
    keyword(
        "additionalProperties",
        ALL,
        Enforced,
        Schema,
        "absent, it counts as `false` where `properties` has names",
    ),
    keyword("required", ALL, Enforced, Value, ""),
    keyword(
        "minProperties",
        ALL,
        InPart,
        Value,
        "if names are free (`additionalProperties`, `patternProperties`), at most one more than `required` has, because a repeated name is one property",
    ),
    keyword(
        "maxProperties",
        ALL,
        InPart,
        Value,
        "with at most six properties that are not required, or few combinations of them",
    ),
    keyword(
        "propertyNames",
        "6+",
        InPart,
        Schema,
        "any strings, a list of names (`enum`, `const`), one `pattern`, one `format`, or a length; not a pattern and a length together",
    ),
    keyword("dependentRequired", "2019-09+", Enforced, Value, ""),
    keyword("dependentSchemas", "2019-09+", Enforced, Schemas, ""),
    keyword("dependencies", "4 to 7", Enforced, Schemas, ""),
    keyword(
        "unevaluatedProperties",
        "2019-09+",
        InPart,
        Schema,
        "with at most one list of alternatives beside it",
    ),
    keyword("allOf", ALL, Enforced, Schema, ""),
    keyword("anyOf", ALL, Enforced, Schema, ""),
    keyword(
        "oneOf",
        ALL,
        InPart,
        Schema,
        "if no value can fit two alternatives (types, values, ranges, a required property that differs), or if they can be kept apart, see `not`",
    ),
    keyword(
        "not",
        ALL,
        InPart,
        Schema,
        "of `type`, `enum`, `const`, lengths and ranges, `required`, `properties`, and of combinations of these by `allOf`, `anyOf` and `not`",
    ),
    keyword(
        "if",
        "7+",
        InPart,
        Schema,
        "if its opposite can be described, see `not`; binds nothing without `then` and `else`",
    ),
    keyword("then", "7+", Enforced, Schema, "binds nothing without `if`"),
    keyword("else", "7+", Enforced, Schema, "binds nothing without `if`"),
    keyword("$ref", ALL, InPart, Value, "within the document, by pointer, anchor or identifier"),
    keyword("$dynamicRef", "2020-12", InPart, Value, "with one target"),
    keyword("$recursiveRef", "2019-09", Enforced, Value, ""),
    keyword("$id", "6+", Name, Value, ""),
    keyword("id", "4", Name, Value, ""),
    keyword("$anchor", "2019-09+", Name, Value, ""),
    keyword("$dynamicAnchor", "2020-12", Name, Value, ""),
    keyword("$recursiveAnchor", "2019-09", InPart, Value, "`true` in the outermost schema only"),
    keyword("$defs", "2019-09+", Name, Schemas, ""),
    keyword("definitions", "4 to 7", Name, Schemas, ""),
    keyword("$schema", ALL, Annotation, Value, "every keyword of every draft counts"),
    keyword("$vocabulary", "2019-09+", Annotation, Value, ""),
    keyword("$comment", "7+", Annotation, Value, ""),
    keyword("title", ALL, Annotation, Value, ""),
    keyword("description", ALL, Annotation, Value, ""),
    keyword("default", ALL, Annotation, Value, ""),
    keyword("examples", "6+", Annotation, Value, ""),
    keyword("deprecated", "2019-09+", Annotation, Value, ""),
    keyword("readOnly", "7+", Annotation, Value, ""),
    keyword("writeOnly", "7+", Annotation, Value, ""),
    keyword("contentEncoding", "7+", Annotation, Value, ""),
    keyword("contentMediaType", "7+", Annotation, Value, ""),
    keyword("contentSchema", "2019-09+", Annotation, Value, ""),
    keyword("discriminator", "OpenAPI", Annotation, Value, "the alternatives of `oneOf` state it themselves"),
    keyword("example", "OpenAPI", Annotation, Value, ""),
    keyword("externalDocs", "OpenAPI", Annotation, Value, ""),
    keyword("xml", "OpenAPI", Annotation, Value, ""),
    keyword("x-guidance", "", InPart, Value, "refused: it could disable checks of the grammar library"),
];
