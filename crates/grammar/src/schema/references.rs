//! Targets of `$ref`, `$dynamicRef` and `$recursiveRef` in a document.

use std::collections::HashMap;

use serde_json::Value;

use super::keywords::{Holds, find};

/// A schema of a document, with the schema that its references are relative to: the nearest one with an `$id`.
#[derive(Clone, Copy)]
pub(super) struct Located<'d> {
    pub schema: &'d Value,
    pub resource: &'d Value,
}

/// Names of all schemas of a document.
pub(super) struct References<'d> {
    root: &'d Value,
    resources: HashMap<*const Value, &'d Value>,
    /// Absolute identifiers.
    ids: HashMap<String, &'d Value>,
    /// Bases of the resources.
    bases: HashMap<*const Value, String>,
    /// Anchors, with their resource and the keyword.
    anchors: Vec<(&'d str, bool, Located<'d>)>,
}

impl<'d> References<'d> {
    pub fn new(root: &'d Value) -> Self {
        let mut this = Self {
            root,
            resources: HashMap::new(),
            ids: HashMap::new(),
            bases: HashMap::from([(std::ptr::from_ref(root), String::new())]),
            anchors: Vec::new(),
        };
        let mut rest = vec![Located { schema: root, resource: root }];
        while let Some(Located { schema, mut resource }) = rest.pop() {
            let Value::Object(keys) = schema else { continue };
            let text = |keyword: &str| keys.get(keyword).and_then(Value::as_str);
            if let Some(id) = text("$id").or_else(|| text("id")) {
                if let Some(anchor) = id.strip_prefix('#') {
                    this.anchors.push((anchor, false, Located { schema, resource }));
                } else {
                    let id = join(&this.bases[&std::ptr::from_ref(resource)], id);
                    resource = schema;
                    this.ids.insert(id.clone(), schema);
                    this.bases.insert(schema, id);
                }
            }
            for (keyword, dynamic) in [("$anchor", false), ("$dynamicAnchor", true)] {
                if let Some(anchor) = text(keyword) {
                    this.anchors.push((anchor, dynamic, Located { schema, resource }));
                }
            }
            this.resources.insert(schema, resource);
            for (keyword, value) in keys {
                match (find(keyword).map(|keyword| keyword.holds), value) {
                    (Some(Holds::Schemas), Value::Object(schemas)) => {
                        rest.extend(schemas.values().map(|schema| Located { schema, resource }));
                    }
                    (Some(Holds::Schema), Value::Array(schemas)) => {
                        rest.extend(schemas.iter().map(|schema| Located { schema, resource }));
                    }
                    (Some(Holds::Schema), schema) => rest.push(Located { schema, resource }),
                    _ => {}
                }
            }
        }
        this
    }

    /// Returns the resource of a schema, which may be its own.
    pub fn resource(&self, schema: &'d Value, parent: &'d Value) -> &'d Value {
        self.resources.get(&std::ptr::from_ref(schema)).copied().unwrap_or(parent)
    }

    /// Returns the target of a reference from a schema of `resource`.
    ///
    /// # Errors
    /// There is no such schema in the document.
    pub fn resolve(
        &self,
        reference: &str,
        resource: &'d Value,
        dynamic: bool,
    ) -> Result<Located<'d>, String> {
        let (id, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        let mut within = resource;
        if !id.is_empty() {
            let absolute = join(&self.bases[&std::ptr::from_ref(resource)], id);
            within = self.ids.get(&absolute).or_else(|| self.ids.get(id)).copied().ok_or_else(|| {
                format!(
                    "`{reference}` is in another document; copy it into `$defs` and refer to `#/$defs/...`"
                )
            })?;
        }
        let fragment = decode(fragment);
        if fragment.is_empty() {
            return Ok(Located { schema: within, resource: within });
        }
        if fragment.starts_with('/') {
            // Authors who copy a schema into another write pointers from the root.
            let found = within.pointer(&fragment).or_else(|| self.root.pointer(&fragment));
            let schema = found.ok_or_else(|| format!("`{reference}` leads to no part of the schema"))?;
            return Ok(Located { schema, resource: self.resource(schema, within) });
        }
        let named: Vec<_> = self.anchors.iter().filter(|(name, ..)| **name == *fragment).collect();
        if dynamic && named.iter().filter(|(_, dynamic, _)| *dynamic).count() > 1 {
            return Err(format!(
                "`{reference}` has several targets, of which the path to it would choose one; use `$ref` with distinct names"
            ));
        }
        let here = named.iter().find(|(.., found)| std::ptr::eq(found.resource, within));
        match here.or(named.first()) {
            Some((.., found)) => Ok(*found),
            None => Err(format!("`{reference}` leads to no part of the schema")),
        }
    }
}

/// Returns the absolute form of an identifier.
fn join(base: &str, id: &str) -> String {
    let id = id.trim_end_matches('#');
    let has_scheme = id.split_once(':').is_some_and(|(scheme, _)| !scheme.contains('/'));
    if has_scheme || base.is_empty() {
        return id.to_owned();
    }
    let origin =
        base.find("://").map_or(0, |at| base[at + 3..].find('/').map_or(base.len(), |end| at + 3 + end));
    if id.starts_with('/') {
        return format!("{}{id}", &base[..origin]);
    }
    let folder = base[origin..].rfind('/').map_or(base.len(), |end| origin + end);
    format!("{}/{id}", &base[..folder])
}

/// Decodes `%41`.
fn decode(fragment: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = fragment.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let byte = (first == b'%').then(|| after.get(..2)).flatten();
        let byte = byte.and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        bytes.push(byte.unwrap_or(first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8(bytes).unwrap_or_else(|_| fragment.to_owned())
}
