//! Templates that try to hang, to eat the memory or to overflow the stack: all of them end with an error, soon.

use std::time::Instant;

use paguro_model::chat::{ChatInput, ChatTemplate, TemplateError, TemplateTokens};
use serde_json::json;

fn render(source: &str) -> Result<String, TemplateError> {
    let messages = json!([{"role": "user", "content": "x".repeat(10_000)}]);
    ChatTemplate::new(source, TemplateTokens::default())?.render(&ChatInput::new(messages))
}

fn check_fails(source: &str) {
    let shown: String = source.chars().take(120).collect();
    // Without a bound, these take hours, and the limit of a test ends them.
    let start = Instant::now();
    let result = render(source);
    let took = start.elapsed();
    assert!(result.is_err(), "{shown}: {} bytes", result.map_or(0, |text| text.len()));
    println!("{:6} ms, {:?}: {shown}", took.as_millis(), result.unwrap_err());
}

#[test]
fn endless_loops_run_out_of_fuel() {
    check_fails("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}");
    check_fails("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}");
    check_fails("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}");
    check_fails("{{ range(1000000000)|length }}");
    check_fails(
        "{% set x = messages[0].content * 1000 %}{% for a in range(99999) %}{{ 'y' in x }}{% endfor %}",
    );
    check_fails(
        "{% set x = messages[0].content * 1000 %}{% for a in range(99999) %}{{ x == x ~ '' }}{% endfor %}",
    );
    check_fails("{% set x = range(99999) %}{% for a in range(99999) %}{{ -1 in x }}{% endfor %}");
}

#[test]
fn growth_is_bounded() {
    for grow in [
        "ns.x ~ ns.x",
        "ns.x + ns.x",
        "ns.x * 2",
        "[ns.x, ns.x]|join",
        "ns.x|replace('x', 'xx')",
        "'%s%s' % (ns.x, ns.x)",
        "'{0}{0}'.format(ns.x)",
        "ns.x.join([ns.x, ns.x])",
        "ns.x.replace('x', 'xx')",
        "[ns.x, ns.x]|string",
        "{'a': ns.x, 'b': ns.x}|tojson",
        "ns.x|escape ~ ns.x",
        "ns.x.center(ns.x|length * 2)",
        "(ns.x ~ '\n' ~ ns.x)|indent(ns.x|length)",
        "(ns.x|list + ns.x|list)|join",
    ] {
        check_fails(&format!(
            "{{% set ns = namespace(x='x') %}}{{% for i in range(99999) %}}{{% set ns.x = {grow} %}}{{% endfor %}}"
        ));
    }
    check_fails(
        "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    );
    check_fails(
        "{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    );
    check_fails(
        "{% set ns = namespace(x=(1,)) %}{% for i in range(99999) %}{% set ns.x = ns.x * 9 %}{% endfor %}",
    );
    check_fails("{% set __budget = 10 ** 15 %}{{ 'x' * 10000000000 }}");
    check_fails("{{ 'x' * 10000000000 }}");
    check_fails("{{ [1] * 10000000000 }}");
    check_fails("{{ 'x'.center(10000000000) }}");
    check_fails("{{ 'x'.zfill(10000000000) }}");
    check_fails("{{ 'x'|center(10000000000) }}");
    check_fails("{{ 'x\ny'|indent(10000000000) }}");
    check_fails("{{ '%10000000000d' % 1 }}");
    check_fails("{{ '%*d' % (10000000000, 1) }}");
    check_fails("{{ '{:10000000000}'.format(1) }}");
    check_fails("{{ '{:{}}'.format(1, 10000000000) }}");
    check_fails("{{ [1]|batch(10000000000, 1)|list }}");
    check_fails("{{ [1]|slice(10000000000, 1)|list }}");
    check_fails("{{ [[[1]]]|tojson(indent=10000000000) }}");
    check_fails("{% for i in range(99999) %}{{ messages[0].content }}{{ messages[0].content }}{% endfor %}");
    check_fails(
        "{% set x %}{% for i in range(99999) %}{{ messages[0].content }}{{ messages[0].content }}{% endfor %}{% endset %}",
    );
    let text = "t".repeat(1 << 20);
    check_fails(&format!("{{% set x %}}{{% for i in range(99999) %}}{text}{{% endfor %}}{{% endset %}}"));
}

#[test]
fn nesting_is_bounded() {
    let nested = |open: &str, close: &str| format!("{}1{}", open.repeat(20_000), close.repeat(20_000));
    for (open, close) in [("(", ")"), ("[", "]"), ("{1:", "}"), ("f(", ")"), ("x[", "]"), ("(1,", ")")] {
        check_fails(&format!("{{{{ {} }}}}", nested(open, close)));
        check_fails(&format!("{{% set ns.x = {} %}}", nested(open, close)));
    }
    check_fails(&format!("{{% set {} = 1 %}}", nested("(", ")")));
    check_fails(&format!("{{% for {} in x %}}{{% endfor %}}", nested("(", ")")));
    for (open, close) in [
        ("{% if 1 %}", "{% endif %}"),
        ("{% if 1 %}{% else %}", "{% endif %}"),
        ("{% for x in y %}", "{% endfor %}"),
        ("{% for x in y recursive %}", "{% endfor %}"),
        ("{% set x %}", "{% endset %}"),
        ("{% with %}", "{% endwith %}"),
        ("{% generation %}", "{% endgeneration %}"),
        ("{% macro f() %}", "{% endmacro %}"),
        ("{% call f() %}", "{% endcall %}"),
        ("{% filter trim %}", "{% endfilter %}"),
        ("{% autoescape true %}", "{% endautoescape %}"),
    ] {
        let blocks = |count| format!("{}1{}", open.repeat(count), close.repeat(count));
        check_fails(&blocks(5_000));
        // Opened and never closed.
        check_fails(&open.repeat(5_000));
    }
    check_fails(&format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}".repeat(7_500)));
    check_fails(&format!("{{% if 0 %}}{}{{% endif %}}", "{% elif 0 %}{% if 0 %}".repeat(5_000)));
}

/// A chain is flat to the eye; to a parser each link is one level deeper.
#[test]
fn chains_are_bounded() {
    for (first, link) in [
        ("1", "|int"),
        ("a", ".b"),
        ("a", "[0]"),
        ("a", "[:]"),
        ("a", "()"),
        ("a", ".b()"),
        ("1", " and 1"),
        ("1", " or 1"),
        ("1", "<2"),
        ("1", " in 1"),
        ("1", " not in 1"),
        ("1", " is odd"),
        ("1", "~1"),
        ("1", "+1"),
        ("1", "-1"),
        ("1", "*1"),
        ("1", "**1"),
        ("1", " if 1 else 1"),
        ("1", " if 1"),
        ("1", ",1"),
        ("x", "|map('x')"),
        ("'a'", "'a'"),
        ("", "not "),
        ("", "-"),
        ("", "- "),
        ("", "not -"),
        ("", "1 if 1 else "),
        ("", "1 and not "),
    ] {
        let last = if first.is_empty() { "1" } else { "" };
        for links in [4_000, 100_000 / link.len(), 240_000 / link.len()] {
            let chain = format!("{first}{}{last}", link.repeat(links));
            for (open, close) in [("{{ ", " }}"), ("{% set x = ", " %}"), ("{% if ", " %}{% endif %}")] {
                check_fails(&format!("{open}{chain}{close}"));
            }
        }
    }
    check_fails(&format!("{{% filter {} %}}{{% endfilter %}}", "trim|".repeat(40_000) + "trim"));
    check_fails(&format!("{{% set a{} = 1 %}}", ".b".repeat(100_000)));
    check_fails(&format!("{{% for {} in x %}}{{% endfor %}}", "a,".repeat(100_000)));
    check_fails(&format!("{{% macro f({}) %}}{{% endmacro %}}", "a=1,".repeat(60_000)));
    check_fails(&"{{ 1 }}".repeat(40_000));
}

/// The longest of what is accepted compiles and renders in a moment, and its remains are dropped.
#[test]
fn the_largest_templates_are_fine() {
    for (first, link) in
        [("1", "|int"), ("a", ".b"), ("1", " and 1"), ("1", "<2"), ("1", "+1"), ("", "not "), ("", "-")]
    {
        let last = if first.is_empty() { "1" } else { "" };
        let chain = format!("{first}{}{last}", link.repeat(1_900));
        let tags = 250_000 / (chain.len() + 10);
        let source = format!("{{% if 0 %}}{{{{ {chain} }}}}{{% endif %}}")
            .repeat(tags.clamp(1, 200_000 / chain.len()));
        assert_eq!(render(&source), Ok(String::new()), "{link}");
    }
    let blocks = |open: &str, close: &str, count| format!("{}1{}", open.repeat(count), close.repeat(count));
    assert_eq!(render(&blocks("{% if 1 %}", "{% endif %}", 140)), Ok("1".into()));
    assert_eq!(
        render(&format!("{{% if 0 %}}{}{{% else %}}1{{% endif %}}", "{% elif 0 %}".repeat(390))),
        Ok("1".into())
    );
    assert_eq!(render(&format!("{{{{ {} }}}}", blocks("[", "]", 50))).map(|text| text.len()), Ok(101));
}

#[test]
fn values_do_not_become_deep() {
    for nest in [
        "[ns.x]",
        "(ns.x,)",
        "{'a': ns.x}",
        "{ns.x: 1}",
        "namespace(x=ns.x)",
        "namespace({'x': ns.x})",
        "dict(x=ns.x)",
        "[ns.x]|map('list')",
        "[[ns.x]]|first",
        "[ns.x]|batch(1)",
        "{'a': ns.x}.items()",
        "{'a': ns.x}|dictsort",
        "[{'a': ns.x}]|groupby('a')",
    ] {
        check_fails(&format!(
            "{{% set ns = namespace(x=1) %}}{{% for i in range(99999) %}}{{% set ns.x = {nest} %}}{{% endfor %}}"
        ));
    }
    // Lazy sequences, each of which refers to the one before.
    for chain in ["ns.x[:]", "ns.x[0:2]", "ns.x|reverse", "ns.x|list", "ns.x + []", "ns.x|map('trim')|list"] {
        let source = format!(
            "{{% set ns = namespace(x=['a', 'b']) %}}{{% for i in range(50000) %}}{{% set ns.x = {chain} %}}{{% endfor %}}{{{{ ns.x|join }}}}"
        );
        assert!(matches!(render(&source).as_deref(), Ok("ab" | "ba") | Err(_)), "{chain}");
    }
    check_fails("{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}");
    check_fails("{% set ns = namespace() %}{% set ns.y = [ns] %}{{ ns }}");
    check_fails("{% set ns = namespace() %}{% set ns.y = {'a': (1, ns)} %}{{ ns }}");
    check_fails(
        "{% set ns = namespace() %}{% macro f() %}{{ ns }}{% endmacro %}{% set ns.y = f %}{{ ns.y() }}",
    );
    check_fails("{% set ns = namespace() %}{% set ns.x = ns %}{% set ns.y = [ns] %}");
    check_fails("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}");
    check_fails("{% macro f(x) %}{{ f([[[[[[[[[[[[[[[[x]]]]]]]]]]]]]]]]) }}{% endmacro %}{{ f(0) }}");
    check_fails("{% for x in [[[1]]] recursive %}{{ loop([[[[[[[[x]]]]]]]]) }}{% endfor %}");
    check_fails("{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{{ f() }}");
    check_fails("{% macro f(n) %}{% filter trim %}{{ f(n) }}{% endfilter %}{% endmacro %}{{ f(0) }}");
    check_fails(
        "{% macro f(n) %}{% for x in [1] %}{% if 1 %}{{ f(n + 1) }}{% endif %}{% endfor %}{% endmacro %}{{ f(0) }}",
    );
    // Two of everything, a hundred times: as many as no computer can visit.
    for visit in [
        "ns.x",
        "ns.x == ns.y",
        "ns.x < ns.y",
        "ns.x in [ns.y]",
        "ns.x|tojson",
        "ns.x|string",
        "[ns.x, ns.y]|sort",
        "[ns.x, ns.y]|unique|list",
        "{ns.x: 1}",
        "ns.x|pprint",
        "[[ns.x, 1]]|groupby(0)|list",
    ] {
        check_fails(&format!(
            "{{% set ns = namespace(x=1, y=1) %}}{{% for i in range(90) %}}{{% set ns.x = [ns.x, ns.x] %}}{{% set ns.y = [ns.y, ns.y] %}}{{% endfor %}}{{{{ {visit} }}}}"
        ));
    }
}

#[test]
fn there_is_one_template() {
    for other in [
        "{% include 'chat_template' %}",
        "{% extends 'chat_template' %}",
        "{% import 'chat_template' as x %}",
        "{% from 'chat_template' import x %}",
    ] {
        check_fails(other);
    }
}

/// minijinja divides by the number of arguments.
#[test]
fn a_panic_is_an_error() {
    check_fails("{% for x in [1] %}{{ loop.cycle() }}{% endfor %}");
}

/// Templates that append to one string, or look back at all messages from each, take time with the square of the chat.
#[test]
fn long_chats_are_fine() {
    let messages: Vec<_> = (0..1000).map(|_| json!({"role": "user", "content": "x".repeat(1000)})).collect();
    let input = ChatInput::new(messages.into());
    let render = |source: &str| ChatTemplate::new(source, TemplateTokens::default()).unwrap().render(&input);
    let append = "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.content %}{% endfor %}{{ ns.x }}";
    assert_eq!(render(append).map(|text| text.len()), Ok(1_000_000));
    let look_back = "{% for m in messages %}{% for n in messages[:loop.index] %}{% if n.role != 'user' %}!{% endif %}{% endfor %}{% endfor %}";
    assert_eq!(render(look_back), Ok(String::new()));
}

#[test]
fn long_flat_expressions_are_fine() {
    let sum = |operator: &str| vec!["1"; 1500].join(operator);
    assert_eq!(render(&format!("{{{{ {} }}}}", sum(" + "))), Ok("1500".into()));
    assert_eq!(render(&format!("{{{{ {} }}}}", sum(" ~ "))), Ok("1".repeat(1500)));
    assert_eq!(render(&format!("{{{{ {} }}}}", sum(" and "))), Ok("1".into()));
    assert_eq!(
        render(&format!("{{{{ {}|length }}}}", "''|trim".to_owned() + &"|trim".repeat(100))),
        Ok("0".into())
    );
}
